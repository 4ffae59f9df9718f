"""What one cache knows: which slots have requests, how long these are, what a call under way uses.

`cache_state` holds the parts together. No policy lives here; nothing here maps or unmaps but `protection`.
"""
