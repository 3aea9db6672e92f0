"""Callbacks for other libraries' trainers. Each module needs the library it is named after."""
