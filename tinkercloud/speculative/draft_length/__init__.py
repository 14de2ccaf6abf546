"""How many tokens to draft: costs, acceptance, goodput, and the controller that weighs them."""
