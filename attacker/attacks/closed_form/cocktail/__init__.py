"""The Cocktail Party attack: separation of the inputs of a linear layer by independent component analysis."""
