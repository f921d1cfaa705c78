"""What the server decides: sampling and storing answers, taking feedback, telling how learning goes."""
