"""The six phases of the loop, which the scheduler calls one after the other; none calls another."""
