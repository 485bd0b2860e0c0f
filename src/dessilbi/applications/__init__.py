"""What the paper does with a path: each file reads like its section."""
