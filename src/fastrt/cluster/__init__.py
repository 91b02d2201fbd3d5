"""The membership of a parameter-server cluster: MindSpore's protocol over a pure state machine."""
