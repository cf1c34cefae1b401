"""What none of the papers shows: their parts together, one file each, found as those in
`penstock.lab.papers` are.
"""
