"""``loadbox doctor``: whether mailboxes work here, and what to do if they do not."""
