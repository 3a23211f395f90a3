# One word, straight from a register.
ptwrite <value>
