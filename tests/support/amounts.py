"""The amounts of resources that a test has set up."""


def counted(amounts):
    """Amounts by name without the memory, which depends on the machine."""
    return {name: amount for name, amount in amounts.items() if name != "memory"}
