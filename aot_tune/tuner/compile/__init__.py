"""Compile in killable processes that see no GPU."""
