"""What AWS's Neuron requires of a program: the form of a module, the rules for it, its compiler, and its devices.

Nothing here needs a Neuron package. It is based on public documents and on the original library's sources. None of it
has been tested on a Neuron device.
"""
