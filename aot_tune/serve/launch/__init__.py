"""Turn a call into a launch: the generated function, its slow path, the checks of the arguments."""
