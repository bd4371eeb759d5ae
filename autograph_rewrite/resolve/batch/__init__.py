"""The batch as the plan sees it: which inputs are cut, and which of their lengths may differ between processes."""
