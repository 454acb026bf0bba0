"""The verbs that begin something: `aot-tune new` a declaration, `aot-tune init` a package with tables."""
