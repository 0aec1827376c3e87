"""Every policy on every scenario, and whether the default one is as good as it must be."""
