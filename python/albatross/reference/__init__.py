"""Plain torch: the meaning of each op, and of the whole model. The oracle of the tests, and the backend of CPUs."""
