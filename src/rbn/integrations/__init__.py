"""Callbacks for other libraries' trainers; each module needs the library of its name."""
