"""Homes made by earlier versions of the code, as archives: each must stay readable by every later version."""
