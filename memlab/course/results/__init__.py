"""What takes longer than a lesson may: results that a script of this folder made, stored beside it."""
