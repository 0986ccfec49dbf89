"""What constrains an output's form: schemas checked keyword by keyword, and grammars compiled off the step loop."""
