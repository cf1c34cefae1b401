"""The papers' figures and tables again, one file each, found by this folder: a module's
`EXPERIMENT` is one.
"""
