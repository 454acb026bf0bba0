"""Archives of prebuilt cubins: find their signatures, build and check them."""
