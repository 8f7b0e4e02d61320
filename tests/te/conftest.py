"""Stand-ins for packages are no tests."""

collect_ignore = ["fakes"]
