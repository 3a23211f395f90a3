# placeholder template
