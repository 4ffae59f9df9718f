"""Virtual-memory drivers behind one contract (`base.py`); `open_driver` picks one by device."""
