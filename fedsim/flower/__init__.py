"""Adapters to Flower: conversion of its records, and wrappers of its `Grid`, the server's connection to its clients."""
