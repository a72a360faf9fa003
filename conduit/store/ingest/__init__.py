"""How a row gets into a page: checked, copied, committed, and the page turned when it is full."""
