"""From a call to a launch: the generated function, its slow path, what it checks."""
