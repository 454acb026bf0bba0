"""Turn a call into a launch: the generated function, its slow path and the checks of the arguments."""
