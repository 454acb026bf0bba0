"""Tables' files and journals, each of two kinds, in the one form that the verbs know."""
