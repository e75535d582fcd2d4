"""What engines share: which requests are taken, what the next step computes, which blocks they hold."""
