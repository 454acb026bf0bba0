"""What host functions share: checks of arguments, overlap, padding. No tile code."""
