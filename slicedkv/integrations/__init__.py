"""Adapters to other libraries. Each module imports the library it is for; import none of them from here."""
