"""Archives of prebuilt cubins: which signatures they need, building them, checking them."""
