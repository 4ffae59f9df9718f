"""Who has which pages: handles, the addresses they are mapped at, and how often.

From left to right: `references` count mappings, `segments` are what a slot has mapped, `page_pool` creates and frees
handles, `backing` maps them behind slots. Nothing here knows torch, lengths of requests or a policy.
"""
