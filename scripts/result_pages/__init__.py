"""The pages of docs/results and the tables of other pages, as texts made from measured JSON."""
