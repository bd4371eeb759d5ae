"""The names of outcomes.

exact           every variable and output is that of one device: within the tolerance, or within what one-ulp changes do
refused         a RewriteError says why not
wrong           a number differs
foreign         an exception that is no RewriteError, or the rewritten graph fails where the original does not
hang            a time limit ended it
broken          the program itself cannot be built or trained on one device
not installed   a library is missing
"""

from __future__ import annotations

OUTCOMES = ("exact", "refused", "wrong", "foreign", "hang", "broken", "not installed")
BAD = ("wrong", "foreign", "hang")
ENOUGH = 0.9
"""Coverage below this is explained."""
