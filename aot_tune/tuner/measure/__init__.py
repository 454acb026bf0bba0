"""Measuring on a GPU, from the parent's side: who is asked, who is blamed, what is retried."""
