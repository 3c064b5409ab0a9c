from hetdpt.torchvision_ops import install
install()
