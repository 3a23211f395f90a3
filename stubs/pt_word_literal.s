# One word that is known beforehand (the header word among them), from the literals behind the stub.
ptwrite qword ptr [rip + {literal:rel32}]
