"""When pages are mapped and taken back.

`victims` says what may be taken back, `reclaim` takes it. `growth` maps pages, `planner` decides what is mapped ahead
of need, and `mapper` runs the planner's work in the background.
"""
