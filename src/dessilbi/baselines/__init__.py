"""The methods the paper compares with, on the same interfaces."""
