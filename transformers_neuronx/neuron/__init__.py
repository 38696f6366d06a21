"""What AWS's Neuron wants of a program: the form of a module, the rules for it, its compiler, its devices.

Nothing here needs a package of Neuron's. What is known of it is from public documents and the original's own sources;
none of it has been tried on a Neuron device.
"""
