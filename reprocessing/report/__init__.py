"""The report of a recovery, as data and as a page with plots, from plan and journal alone. Read `facts.py` first.

`facts.py` has what the page shows, `plots.py` and `difference_plots.py` draw it, `page.py` writes
`<state>/recoveries/<plan>/report.html`. `batches.py` joins the batches of a ledger to columns, which the journal
stores: the page can be made again when tables and ledger have moved on.
"""
