"""What ops with the promise cross-machine share: their arithmetic and how their kernels are started."""
