"""Studies of the papers: every table and figure as a typed entry, the runs that fill it, and the pages made from them.

Run from the repository root:

    python -m papers --list               # every study and what it takes
    python -m papers chiu2020-table1      # run a study; results go to results/chiu2020-table1.json
    python -m papers publish              # tables, figures and pages from results/*.json
"""

from hmmlm.cli.main import shorten_spinning

shorten_spinning()  # as the commands do
