"""Local training of a client: order of its examples, optimiser steps, and privacy accounting."""
