"""What a graph does on accelerators: which ops fall to the host for want of a kernel, what crosses between both."""
