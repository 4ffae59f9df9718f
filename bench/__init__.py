"""Measurements of slicedkv: one question a file.

`support` holds their tools, `baselines` what slicedkv is compared with, `reporting` makes the report of `results/`.
"""
