"""Update rules of optimisers; each is a frozen value."""
