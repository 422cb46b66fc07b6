"""What a model remembers of a text: keys and values, recurrent states, and their layout."""
