"""The paper's tables and figures: its numbers, ours, and the report that compares them."""
