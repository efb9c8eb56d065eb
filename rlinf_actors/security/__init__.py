"""Who may talk to whom: keys, members, and what each may say."""
