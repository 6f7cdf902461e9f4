"""What the forward pass stores for the backward pass, and rewrites of linear jaxprs."""
